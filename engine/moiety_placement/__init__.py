"""Where the replicas of experts stand: from how much each expert is used to which rank holds which, and when to move.

A leaf beside the wire, of pure functions over numpy arrays: it knows no tensors, no devices and no network. Whoever
counts loads gives them, and whoever holds weights moves them.

Dimensions: L layers, E experts of a layer, R replicas of a layer, which are its slots, G ranks, S slots of a rank (R =
G·S, a rank's slots lie side by side), N nodes, C the most replicas that an expert has, T tokens, K experts of a token.
"""
