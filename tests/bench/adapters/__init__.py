"""What thousands of adapters cost a server: throughput, stalls of other streams, cold starts."""
