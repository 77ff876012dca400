"""The control plane: router, scheduler, prefix cache and adapter pool; it never reaches torch."""
