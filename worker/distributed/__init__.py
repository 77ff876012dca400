"""Collectives of a tensor-parallel group: NCCL, gloo, shared memory, TCP, threads."""
