"""scripts/bench: dcp_s3 and its peers side by side, on one machine, against one S3 endpoint."""
