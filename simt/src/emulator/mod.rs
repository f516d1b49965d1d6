//! The face's CPU body.
