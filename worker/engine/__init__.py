"""One tensor-parallel rank: plans, running sequences, steps, and the server that takes plans."""
