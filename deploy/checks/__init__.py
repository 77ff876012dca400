"""What is looked at before a server starts: by `topwork serve` and `topwork check` alike."""
