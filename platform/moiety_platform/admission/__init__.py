"""Admission control: bounds on requests in flight, and early refusal of hopeless requests."""
