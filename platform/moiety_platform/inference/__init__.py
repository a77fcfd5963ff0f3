"""The request pipeline of all inference APIs: authenticate, parse, classify, admit, reserve, place, stream, settle."""
