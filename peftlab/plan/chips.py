"""The TPU chips that can be planned for: memory, bandwidths and peak rates, with their sources.

Google's own pages, as of November 2026; all figures are per chip:

- docs.cloud.google.com/tpu/docs/v5e: 16 GB HBM, 819 GB/s; 197 Tflop/s bfloat16, 393 Top/s int8;
  interconnect 400 GB/s in both directions together, 4 ports, a torus of 2 dimensions.
- docs.cloud.google.com/tpu/docs/v5p: 95 GB HBM, 2765 GB/s; 459 Tflop/s; 6 ports, 3 dimensions.
- docs.cloud.google.com/tpu/docs/v6e: 32 GB HBM, 1638 GB/s; 918 Tflop/s bfloat16, 1836 Top/s int8;
  interconnect 800 GB/s in both directions together, 4 ports, 2 dimensions.
- docs.cloud.google.com/tpu/docs/tpu7x: 192 GiB HBM, 7380 GB/s; 2307 Tflop/s bfloat16, 4614 fp8;
  interconnect 1200 GB/s (and of v5p 1200 GB/s) in both directions together; two TensorCores, each a
  device of its own to JAX with half of the memory.

Where these pages print one size as GB and as GiB, it is GiB: the compiler for v6e has 31.25 GiB of
32. No page has a peak for float32: matrices of float32 are multiplied on the unit for bfloat16, by
default in one pass, so they share its peak here.

The clock is the peak rate over the operations that the matrix units start per cycle: 2 x 128 x 128
x 4 (v5e), x 8 (v5p); 2 x 256 x 256 x 4 (v6e, and each device of tpu7x). It is checked against the
compiler's cycles for large products, which reach 70 to 95 % of that number and never more.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One device as JAX sees it (of tpu7x half a chip).

  Attributes:
    name: as in the name of a topology.
    per_chip: devices of a chip.
    hbm: bytes of main memory.
    bandwidth: of it, bytes per second.
    flops: {dtype: peak operations per second}.
    clock: cycles per second, in which the compiler estimates.
    link: bytes per second that it can send through one port, in one direction.
    ports: of the interconnect.
  """

  name: str
  per_chip: int = 1
  hbm: int
  bandwidth: float
  flops: Mapping[str, float]
  clock: float
  link: float
  ports: int

  @property
  def peak(self) -> float:
    """Peak operations per second of matrix products in bfloat16."""
    return self.flops['bfloat16']

  @property
  def send(self) -> float:
    """Bytes per second that it can send through all ports at once."""
    return self.link * self.ports


def _chip(
  name: str,
  *,
  hbm: float,
  bandwidth: float,
  bf16: float,
  eight: float,
  units: int,
  both_ways: float,
  ports: int,
  per_chip: int = 1,
) -> Chip:
  """A device from the figures of a chip: GiB, GB/s, Tflop/s, operations per cycle."""
  peak = bf16 * 1e12 / per_chip
  flops = {'bfloat16': peak, 'float32': peak, 'eight_bits': eight * 1e12 / per_chip}
  return Chip(
    name=name,
    per_chip=per_chip,
    hbm=int(hbm * _GIB) // per_chip,
    bandwidth=bandwidth * 1e9 / per_chip,
    flops=flops,
    clock=peak / units,
    link=both_ways * 1e9 / 2 / ports / per_chip,
    ports=ports,
  )


_SMALL, _LARGE = 2 * 128 * 128, 2 * 256 * 256

CHIPS: Mapping[str, Chip] = {
  chip.name: chip
  for chip in (
    _chip(
      'v5e',
      hbm=16,
      bandwidth=819,
      bf16=197,
      eight=393,
      units=4 * _SMALL,
      both_ways=400,
      ports=4,
    ),
    _chip(
      'v5p',
      hbm=95,
      bandwidth=2765,
      bf16=459,
      eight=918,
      units=8 * _SMALL,
      both_ways=1200,
      ports=6,
    ),
    _chip(
      'v6e',
      hbm=32,
      bandwidth=1638,
      bf16=918,
      eight=1836,
      units=4 * _LARGE,
      both_ways=800,
      ports=4,
    ),
    _chip(
      'tpu7x',
      hbm=192,
      bandwidth=7380,
      bf16=2307,
      eight=4614,
      units=4 * _LARGE,
      both_ways=1200,
      ports=6,
      per_chip=2,
    ),
  )
}
