"""What a scheduling decision costs: our scheduler beside tokenspeed-scheduler's C++ core."""
