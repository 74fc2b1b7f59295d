"""The kubelet's APIs: gRPC over Unix sockets, protobuf messages, and the kubelet's directories."""
