"""What operators set, how every field is checked, and the limits on what callers may ask."""
