"""Inputs of the operations of recurrent layers, and the code that their implementations share."""
