"""Bytes at rest: stores, leases, caches, shards, sealed records, tensor files."""
