"""The recorded forward: what a CPU has in place of a CUDA graph.

While a model serves, its forwards are written down as flat lists of torch calls. Where lists of steps of different
sizes agree, later steps run the list and leave the model's Python out. What cannot be recorded soundly runs as ever.
"""
