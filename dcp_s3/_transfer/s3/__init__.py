"""Requests to S3: clients, both planes, what their errors mean, and what a store can do."""
