"""What tests of several suites need: ranks."""
