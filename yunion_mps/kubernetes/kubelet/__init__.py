"""The kubelet's APIs: gRPC over Unix sockets, their messages, and the kubelet's directories."""
