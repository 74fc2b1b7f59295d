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
WIDE, FULL = "░" * 23, "█" * 23
SCREEN_120 = f"""\
yunion-mps 0.1.0  HH:MM:SS  degraded  driver 535.261.03
1 GPU; 4 devices: 3 used, 1 free; 2 leases, 1 waiting; 2 processes
Problem: 00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
  hint: ask its owner, or terminate it: yunion-mps terminate 4260
Problem: PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) without MPS, so no budget limits it
  hint: ask its owner, or terminate it: yunion-mps terminate 4711
Warning: GPU 00:06.0 (Tesla P40): budgets are not enforced because it is older than Volta; its clients can \
use all of i…
GPU                                USED GiB  TOTAL POWER W TEMP C UTIL % IN USE         PROCS        NAME
00:06.0    ██████▎░░░░░░░░░░░░░░░░      6.2   22.5                       3 of 4             2        Tesla P40
DEVICE                             USED GiB BUDGET    PEAK   SM % UTIL % USER             PID    AGE COMMAND
00:06.0-1! {FULL}      5.9    5.6     5.0     25     42 alice           4260     2h python train.py
00:06.0!   {WIDE}      0.3                           42 mallory         4711     3h ./old-job
00:06.0-2  {WIDE}      0.0    5.6     5.0     25        bob                      5d job-17
00:06.0-3  {WIDE}      0.0    5.6             25        bob                      5d job-17
00:06.0-0  {WIDE}             5.6             25        free
EVENTS
HH:MM:SS info    domain host: applying -> ready
HH:MM:SS WARNING domain host: ready -> backoff (killed by signal 9)
"""
STATUS_80 = """\
State:    degraded
Problem:  00:06.0-1 uses 6000 of 5760 MiB: PID 4260 of alice (python train.py)
Hint:     ask its owner, or terminate it: yunion-mps terminate 4260
Problem:  PID 4711 of mallory (./old-job) uses GPU 00:06.0 (300 MiB) without
          MPS, so no budget limits it
Hint:     ask its owner, or terminate it: yunion-mps terminate 4711
Warning:  GPU 00:06.0 (Tesla P40): budgets are not enforced because it is older
          than Volta; its clients can use all of its memory and threads
Hint:     run only jobs that stay within their budgets; find those that do not:
          yunion-mps who
Devices:  4 of 4 available, 3 used, 1 free (1 without enforced budgets)
Leases:   2, 1 waiting; 2 processes, 1 outside MPS
GPUs:     1
Driver:   535.261.03, CUDA 12.2
Host:     NAME, id ID
Daemon:   0.1.0, PID N, up T
GPU      NAME       STATE      DEVICES  IN USE  FREE       MEMORY USED
00:06.0  Tesla P40  available        4       3     1  6300 / 23040 MiB
"""
DOMAINS_80 = """\
DOMAIN  STATE   PID  RESTARTS  GPUS  DEFAULT LIMIT   PIPE DIRECTORY
host    ready  4242         0     1  5760 MiB, 25 %  /tmp/nvidia-mps/pipe
"""
