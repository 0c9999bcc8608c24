"""The test suite of dcp_s3: see README.md beside this file."""
