"""What tenants share and what each may have: what routers, pool and schedulers count alike."""
