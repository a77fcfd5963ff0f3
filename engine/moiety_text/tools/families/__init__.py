"""Tool-call formats of model families: each module has the readers and the formats of one family.

`registry` lists them. A new family is one module here and one entry there (docs/add-a-tool-format.md).
"""
