"""The part of the JobSet v1alpha2 and batch/v1 Job schemas that a trial uses, written by hand.

From the public API references of JobSet and Kubernetes: field names, types, enumerations, required
fields. A field that is not listed is an error, so a misspelt one is noticed.
"""

import re

STRING, INTEGER = {'type': str}, {'type': int, 'least': 0}
NAME = {'type': str, 'pattern': r'[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?'}
# A rule's name in JobSet: an identifier that begins with a letter.
RULE_NAME = {'type': str, 'pattern': r'[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?'}
WORDS = {'type': dict, 'values': STRING}


def enum(*words):
  return {'type': str, 'enum': words}


def items(schema):
  return {'type': list, 'items': schema}


def fields(required=(), **known):
  return {'type': dict, 'fields': known, 'required': required}


ON_EXIT_CODES = fields(
  ('operator', 'values'),
  containerName=NAME,
  operator=enum('In', 'NotIn'),
  values=items({'type': int, 'least': 1}),
)
POD_FAILURE_RULE = fields(
  ('action',), action=enum('FailJob', 'FailIndex', 'Ignore', 'Count'), onExitCodes=ON_EXIT_CODES
)
FIELD = fields(('fieldPath',), fieldPath=STRING)
VARIABLE = fields(
  ('name',),
  name={'type': str, 'pattern': r'[-._a-zA-Z][-._a-zA-Z0-9]*'},
  value=STRING,
  valueFrom=fields(fieldRef=FIELD),
)
CONTAINER = fields(
  ('name', 'image'),
  name=NAME,
  image={'type': str, 'least': 1},
  command=items(STRING),
  env=items(VARIABLE),
  ports=items(fields(('containerPort',), containerPort={'type': int, 'least': 1})),
  resources=fields(limits={'type': dict, 'values': INTEGER}),
  volumeMounts=items(fields(('name', 'mountPath'), name=NAME, mountPath=STRING)),
)
VOLUME = fields(
  ('name',), name=NAME, persistentVolumeClaim=fields(('claimName',), claimName=STRING)
)
POD = fields(
  ('containers', 'restartPolicy'),
  restartPolicy=enum('Never', 'OnFailure'),
  terminationGracePeriodSeconds=INTEGER,
  nodeSelector=WORDS,
  containers=items(CONTAINER),
  volumes=items(VOLUME),
)
JOB = fields(
  ('template',),
  parallelism=INTEGER,
  completions=INTEGER,
  completionMode=enum('NonIndexed', 'Indexed'),
  backoffLimit=INTEGER,
  podFailurePolicy=fields(('rules',), rules=items(POD_FAILURE_RULE)),
  template=fields(('spec',), spec=POD),
)
FAILURE_RULE = fields(
  ('name', 'action'),
  name=RULE_NAME,
  action=enum('FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts'),
  onJobFailureReasons=items(
    enum(
      'BackoffLimitExceeded',
      'DeadlineExceeded',
      'FailedIndexes',
      'MaxFailedIndexesExceeded',
      'PodFailurePolicy',
    )
  ),
  targetReplicatedJobs=items(STRING),
)
REPLICATED_JOB = fields(
  ('name', 'template'), name=NAME, replicas=INTEGER, template=fields(('spec',), spec=JOB)
)
JOBSET = fields(
  ('apiVersion', 'kind', 'metadata', 'spec'),
  apiVersion=enum('jobset.x-k8s.io/v1alpha2'),
  kind=enum('JobSet'),
  metadata=fields(('name',), name=NAME, namespace=NAME, labels=WORDS, annotations=WORDS),
  spec=fields(
    replicatedJobs=items(REPLICATED_JOB),
    failurePolicy=fields(maxRestarts=INTEGER, rules=items(FAILURE_RULE)),
  ),
)


def check(schema, value, where='manifest'):
  """Raises AssertionError unless a value fits a schema of `jobset_crd`."""
  assert type(value) is schema['type'], (where, value)
  if 'enum' in schema:
    assert value in schema['enum'], (where, value)
  if 'pattern' in schema:
    assert re.fullmatch(schema['pattern'], value), (where, value)
  if 'least' in schema:
    assert (len(value) if schema['type'] is str else value) >= schema['least'], (where, value)
  if schema['type'] is list:
    for i, item in enumerate(value):
      check(schema['items'], item, f'{where}[{i}]')
  if schema['type'] is dict and 'values' in schema:
    for key, item in value.items():
      check(schema['values'], item, f'{where}.{key}')
  elif schema['type'] is dict:
    assert set(schema['required']) <= set(value) <= set(schema['fields']), (where, set(value))
    for key, item in value.items():
      check(schema['fields'][key], item, f'{where}.{key}')
