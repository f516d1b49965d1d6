mod report;
mod values;
