"""Diagnostics of recall, copying and memory: MQAR, MAD, induction heads, selective copying."""
