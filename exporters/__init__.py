"""What the guard knows, in the languages of other systems: Prometheus today."""
