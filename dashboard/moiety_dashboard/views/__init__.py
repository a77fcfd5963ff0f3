"""One module a page; each draws what `frames` and `charts` made of the API's answers."""
