"""Command-line options of an engine, each declared once for every command, the configuration file and the chart."""
