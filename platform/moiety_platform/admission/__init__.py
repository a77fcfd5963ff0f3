"""Admission control: bounds on requests in flight, and early refusal of requests that would miss their SLO."""
