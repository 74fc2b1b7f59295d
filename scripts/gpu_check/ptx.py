"""The two kernels, as PTX: text that every driver compiles for its own GPU, so no compiler is needed here.

`work` keeps four independent chains of multiply-adds going in every thread, and notes on which SM each block
ran. `fault` stores to an address that nobody has.
"""

from __future__ import annotations

#: PTX version and target, tried in this order: what compiles is settled by the driver. sm_75 needs PTX 6.3.
TARGETS = (("6.3", "sm_75"), ("6.0", "sm_70"), ("6.0", "sm_50"), ("8.0", "sm_90"))

#: More SMs than any GPU has; `work` writes one word for each.
MOST_MULTIPROCESSORS = 1024

#: Threads of every block of `work`.
THREADS = 256

_KERNELS = """
.visible .entry work(.param .u64 marks, .param .u32 iterations)
{
    .reg .pred %again, %never, %first;
    .reg .f32 %a, %b, %c, %d, %m, %n;
    .reg .u32 %i, %end, %thread, %sm, %one;
    .reg .u64 %base, %place, %offset;

    ld.param.u64 %base, [marks];
    ld.param.u32 %end, [iterations];
    cvta.to.global.u64 %base, %base;
    mov.u32 %thread, %tid.x;
    cvt.rn.f32.u32 %a, %thread;
    add.f32 %b, %a, 0f3F800000;
    add.f32 %c, %a, 0f40000000;
    add.f32 %d, %a, 0f40400000;
    mov.f32 %m, 0f3F7FF972;
    mov.f32 %n, 0f3A83126F;
    mov.u32 %i, 0;
    mov.u32 %one, 1;
LOOP:
    fma.rn.f32 %a, %a, %m, %n;
    fma.rn.f32 %b, %b, %m, %n;
    fma.rn.f32 %c, %c, %m, %n;
    fma.rn.f32 %d, %d, %m, %n;
    fma.rn.f32 %a, %a, %m, %n;
    fma.rn.f32 %b, %b, %m, %n;
    fma.rn.f32 %c, %c, %m, %n;
    fma.rn.f32 %d, %d, %m, %n;
    add.u32 %i, %i, 1;
    setp.lt.u32 %again, %i, %end;
    @%again bra LOOP;
    add.f32 %a, %a, %b;
    add.f32 %c, %c, %d;
    add.f32 %a, %a, %c;
    setp.lt.f32 %never, %a, 0fFF000000;
    @%never st.global.f32 [%base], %a;
    setp.eq.u32 %first, %thread, 0;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %sm, 4;
    add.u64 %place, %base, %offset;
    @%first st.global.u32 [%place], %one;
    ret;
}

.visible .entry fault(.param .u64 address)
{
    .reg .u32 %one;
    .reg .u64 %place;

    ld.param.u64 %place, [address];
    mov.u32 %one, 1;
    st.global.u32 [%place], %one;
    ret;
}
"""


def module(version: str, target: str) -> bytes:
    """The text for one target, with the NUL that the driver reads to."""
    head = f".version {version}\n.target {target}\n.address_size 64\n"
    return (head + _KERNELS).encode() + b"\0"
