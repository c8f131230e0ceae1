"""Telemetry: records from the tick, spans for collectors, typed columns for SQL."""
