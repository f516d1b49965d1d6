//! What every device has to do, on the host executor.

use oxattn::Device;
use oxattn_tests::device_tests;

device_tests!(Some(Device::cpu()));
