//! The generated types of `baleen.worker.v1`. They go no further than this folder and the tests' fake worker.
#![expect(clippy::allow_attributes, clippy::allow_attributes_without_reason, reason = "generated code")]

tonic::include_proto!("baleen.worker.v1");
