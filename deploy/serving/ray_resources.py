"""What of Ray's CPUs each process takes: they are counted, not given, and cores are shared."""

# A scheduler, a rank on a CPU and a router take one each, but for what the adapter pool takes: else
# it would keep the last of them from nodes that they fill.
ONE_CPU, POOL_CPU = 0.99, 0.01
