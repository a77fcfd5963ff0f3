"""Preemption: sequences that give up their blocks or their slot in the batch for others."""
