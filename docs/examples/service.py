"""A FastAPI service that holds a device for its model: fastapi run service.py --workers 2.

Each worker process takes its own device when it starts, and releases it when it stops.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from yunion_mps import AsyncClient
from yunion_mps.client import UnreachableError, YunionError


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold a device; whatever loads CUDA is imported after its variables are set."""
    async with AsyncClient().lease(wait_s=60) as lease:
        os.environ.update(lease.environment)
        # import torch; app.state.model = torch.load("model.pt", map_location="cuda")
        app.state.lease = lease
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Fail once the GPU is lost, so that the service is restarted and takes another device."""
    try:
        await app.state.lease.check()
    except UnreachableError:
        pass  # the device can be used while the daemon restarts
    except YunionError as error:
        raise HTTPException(503, f"{error.message} [{error.code}]") from None
    return {"device": app.state.lease.devices[0]}
