"""Expert placement and load balancing (EPLB): from expert loads to the experts of each rank, and when to move them.

A leaf package of pure functions over numpy arrays: it knows no tensors, no devices and no network. The caller provides
the loads and moves the weights.

Dimensions: L layers, E experts of a layer, R replicas of a layer, which are its slots, G ranks, S slots of a rank (R =
G·S, a rank's slots are contiguous), N nodes, C the most replicas of an expert, T tokens, K experts of a token.
"""
