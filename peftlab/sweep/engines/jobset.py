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
        completionMode: Indexed
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
              command: {command}{place}
              resources:
                limits:
                  google.com/tpu: {chips}{volume}
"""
# The first pod of a JobSet has a name in its network; Kubernetes counts the pods of an indexed job.
_PLACE = """
              env:
              - name: JAX_COORDINATOR_ADDRESS
                value: {coordinator}
              - name: JAX_NUM_PROCESSES
                value: {count}
              - name: JAX_PROCESS_ID
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              ports:
              - containerPort: {port}
"""
_PORT = 8476  # where process 0 listens
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
    hosts: of the slice; each runs one process of a trial.
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
      ValueError: no image, or another number of hosts than of processes.
    """
    hosts = max(self.hosts, job.processes)
    if job.processes > 1 and self.hosts not in (1, job.processes):
      raise ValueError(
        f'--processes is {job.processes} and --option=hosts= {self.hosts}; each host of a slice '
        'runs one process, so expected one number.'
      )
    if not self.image:
      raise ValueError('The engine jobset needs --option=image=..., the container with peftlab.')
    volume = _VOLUME.format(mount=json.dumps(self.mount), claim=json.dumps(self.claim))
    values = {
      'name': re.sub(r'[^a-z0-9-]', '-', job.name.lower()),
      'ids': ' '.join(job.ids),
      'again': sorted(engine.AGAIN),
      'command': ['peftlab', *job.argv],
      'hosts': hosts,
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
    options = {
      'place': _place(str(values['name']), hosts) if hosts > 1 else '',
      'volume': volume.rstrip() if self.claim else '',
    }
    return '---\n' + _TEMPLATE.format(**texts, **options).rstrip()

  def run(self, job: engine.Job) -> int:
    """Raises ValueError: there is nothing to run."""
    raise ValueError(f'The engine jobset starts nothing, so it cannot run {job.name}.')

  def stop(self) -> None:
    """Nothing runs."""


def _place(name: str, hosts: int) -> str:
  """What tells the process of each pod its place: see `peftlab.train.joining`."""
  coordinator = f'{name}-trial-0-0.{name}:{_PORT}'
  texts = {'coordinator': json.dumps(coordinator), 'count': json.dumps(str(hosts)), 'port': _PORT}
  return _PLACE.format(**texts).rstrip()
