"""The engine `jobset`: prints one Kubernetes JobSet per job, for GKE TPU slices behind Kueue."""

from __future__ import annotations

import dataclasses
import json
import re

from peftlab.sweep.engines import engine

_TEMPLATE = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
  namespace: {namespace}
  labels:
    kueue.x-k8s.io/queue-name: {queue}
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
    peftlab/trials: {ids}
spec:
  failurePolicy:
    maxRestarts: {restarts}
    rules:
    - name: failedwithrow
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: trial
    replicas: 1
    template:
      spec:
        parallelism: {hosts}
        completions: {hosts}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: peftlab
              operator: NotIn
              values: {again}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {grace}
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: {accelerator}
              cloud.google.com/gke-tpu-topology: {topology}
            containers:
            - name: peftlab
              image: {image}
              command: {command}
              resources:
                limits:
                  google.com/tpu: {chips}{volume}
"""
_VOLUME = """
              volumeMounts:
              - name: root
                mountPath: {mount}
            volumes:
            - name: root
              persistentVolumeClaim:
                claimName: {claim}
"""


@engine.engines.register('jobset')
@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSet(engine.Engine):
  """Starts nothing: the output is for `kubectl apply -f -`.

  A process that saved and was told to stop, or died, is started again by the JobSet; one that
  ended with any other code has written its row, and the JobSet fails at once.

  Attributes:
    image: of the container, with peftlab in it.
    queue: Kueue's local queue.
    namespace: of the JobSets.
    accelerator: of the nodes, GKE's word: tpu-v6e-slice.
    topology: of the slice: 2x4.
    hosts: of the slice.
    chips: of a host.
    restarts: of a trial, at most.
    grace: seconds between SIGTERM and the end of a pod, for the last checkpoint.
    claim: a volume claim with the sweep's root; '': the image sees the root by itself.
    mount: where that volume lies.
  """

  starts = False

  image: str = ''
  queue: str = 'default'
  namespace: str = 'default'
  accelerator: str = 'tpu-v6e-slice'
  topology: str = '2x4'
  hosts: int = 1
  chips: int = 8
  restarts: int = 5
  grace: int = 120
  claim: str = ''
  mount: str = '/sweep'

  def __post_init__(self):
    if self.hosts < 1 or self.chips < 1:
      raise ValueError(f'A JobSet has {self.hosts} hosts of {self.chips} chips; at least 1 each.')

  def render(self, job: engine.Job) -> str:
    """The manifest, as a YAML document; values are JSON, which is YAML too.

    Raises:
      ValueError: no image.
    """
    if not self.image:
      raise ValueError('The engine jobset needs --option=image=..., the container with peftlab.')
    volume = _VOLUME.format(mount=json.dumps(self.mount), claim=json.dumps(self.claim))
    values = {
      'name': re.sub(r'[^a-z0-9-]', '-', job.name.lower()),
      'ids': ' '.join(job.ids),
      'again': sorted(engine.AGAIN),
      'command': ['peftlab', *job.argv],
      'hosts': self.hosts,
      'chips': self.chips,
      'restarts': self.restarts,
      'grace': self.grace,
      'namespace': self.namespace,
      'queue': self.queue,
      'accelerator': self.accelerator,
      'topology': self.topology,
      'image': self.image,
    }
    texts = {name: json.dumps(value) for name, value in values.items()}
    return (
      '---\n' + _TEMPLATE.format(**texts, volume=volume.rstrip() if self.claim else '').rstrip()
    )

  def run(self, job: engine.Job) -> int:
    """Raises ValueError: there is nothing to run."""
    raise ValueError(f'The engine jobset starts nothing, so it cannot run {job.name}.')

  def stop(self) -> None:
    """Nothing runs."""
