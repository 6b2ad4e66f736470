"""Appliers: scan, sequential and pipeline run a stack of layers in one signature."""

from peftlab.appliers.applier import Applier as Applier
from peftlab.appliers.applier import Created as Created
from peftlab.appliers.applier import absorb as absorb
from peftlab.appliers.applier import get_applier as get_applier
from peftlab.appliers.pipeline import Pipeline as Pipeline
from peftlab.appliers.scan import Scan as Scan
from peftlab.appliers.sequential import Sequential as Sequential
