"""The parts of one machine as supervised processes: started together, restarted when they die, drained at the end.

Knows processes, ports and the data directory; of a part only its command line. Imports nothing heavy: it runs while the
parts import what they need.
"""
