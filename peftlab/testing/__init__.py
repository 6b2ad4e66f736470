"""For tests: CPU devices, meshes, tiny models, and the suite that any adapter is put through."""

# Devices and models.
# The suite.
from peftlab.testing.case import Case as Case
from peftlab.testing.case import NotApplicable as NotApplicable
from peftlab.testing.devices import meshes as meshes
from peftlab.testing.devices import quick_compiles as quick_compiles
from peftlab.testing.devices import use_cpu_devices as use_cpu_devices
from peftlab.testing.models import ListModel as ListModel
from peftlab.testing.models import StackModel as StackModel
from peftlab.testing.models import ZooModel as ZooModel
from peftlab.testing.suite import Property as Property
from peftlab.testing.suite import Result as Result
from peftlab.testing.suite import check as check
from peftlab.testing.suite import check_adapter as check_adapter
from peftlab.testing.suite import properties as properties
from peftlab.testing.suite import results as results
from peftlab.testing.suite import select as select
