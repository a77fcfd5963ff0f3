"""Command `moiety doctor`: find the problems of a deployment and their remedies. Changes nothing."""
