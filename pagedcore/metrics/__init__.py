"""What is measured and how it is shown. Imported when metrics are first asked for."""
