"""What operators look at: the page of metrics, dashboards, rules and alerts."""
