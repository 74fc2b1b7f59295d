"""The messages of the kubelet's APIs: what is used of them, as .proto files, and the code that is generated.

`scripts/protos` generates it. Unknown fields, of a newer kubelet, are ignored.
"""
