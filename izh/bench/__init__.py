"""Measurements that print what they measured, beside a peer in the same run. Must not know: how the engine works."""
