"""yunion-mps: NVIDIA MPS as a service."""

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]

TYPE_CHECKING = False  # true for type checkers, as typing's own, whose import every start would pay
if TYPE_CHECKING:
    from yunion_mps.client import Client as Client
else:

    def __getattr__(name: str) -> object:
        """The client is imported only where somebody uses it."""
        if name != "Client":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from yunion_mps.client import Client

        return Client
