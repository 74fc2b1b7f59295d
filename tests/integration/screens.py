"""The screens that are expected on the host of test_screens.py, to the letter."""

from __future__ import annotations

BAR = "░" * 10
SCREEN_80 = f"""\
yunion-mps 0.1.0  HH:MM:SS  degraded  driver 535.261.03
1 GPU; 4 devices: 3 used, 1 free; 2 leases, 1 waiting; 2 processes
Problem: 00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
  hint: ask its owner, or terminate it: yunion-mps terminate 4260
Problem: PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) without MPS…
1 more; show all: yunion-mps status
GPU                   USED GiB  TOTAL TEMP C UTIL % IN USE     PROCS NAME
00:06.0    ██▊░░░░░░░      6.2   22.5               3 of 4         2 Tesla P40
DEVICE                USED GiB BUDGET   SM % UTIL % USER         PID COMMAND
00:06.0-1! ██████████      5.9    5.6     25     42 alice       4260 python tra…
00:06.0!   {BAR}      0.3                   42 mallory     4711 ./old-job
00:06.0-2  {BAR}      0.0    5.6     25        bob              job-17
00:06.0-3  {BAR}      0.0    5.6     25        bob              job-17
00:06.0-0  {BAR}             5.6     25        free
EVENTS
HH:MM:SS info    domain host: applying -> ready
HH:MM:SS WARNING domain host: ready -> backoff (killed by signal 9)
"""
FOOT = " q  quit  s  sort: busiest  v  view: all  ↑↓  scroll  every 1 s"
