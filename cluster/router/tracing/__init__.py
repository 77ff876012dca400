"""What becomes of a call, as OpenTelemetry's spans: noted here, sent by its SDK."""
