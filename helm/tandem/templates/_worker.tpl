{{/* Pods of prefill and decode: (dict "root" $ "role" "decode"). */}}

{{/* Values of one role: those of `workers`, and its own over them. As YAML. */}}
{{- define "tandem.workers" -}}
{{- mergeOverwrite (deepCopy .root.Values.workers) (index .root.Values .role) | toYaml -}}
{{- end -}}

{{- define "tandem.roleName" -}}
{{- printf "%s-%s" (include "tandem.fullname" .root) .role -}}
{{- end -}}

{{- define "tandem.workerPod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $values := include "tandem.workers" . | fromYaml -}}
{{- $part := dict "root" $root "values" $values "part" $role "role" $role -}}
metadata:
  labels:
    {{- include "tandem.podLabels" $part | nindent 4 }}
  annotations:
    {{- include "tandem.podAnnotations" $part | nindent 4 }}
spec:
  {{- include "tandem.podBasics" $part | nindent 2 }}
  # The grace that the worker knows of, and 30 s for what its ranks do after it.
  terminationGracePeriodSeconds: {{ add $values.drainSeconds 30 }}
  containers:
    - name: {{ $role }}
      {{- include "tandem.workerContainer" $part | nindent 6 }}
  volumes:
    {{- include "tandem.commonVolumes" $root | nindent 4 }}
    {{- include "tandem.computeVolumes" $part | nindent 4 }}
{{- end -}}

{{- define "tandem.workerContainer" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $device := include "tandem.device" . -}}
{{- $ranks := include "tandem.ranksPerHost" . | int -}}
image: {{ include "tandem.image" (dict "root" $root "device" $device) | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: [tandem, worker, {{ .role }}]
args:
  {{- include "tandem.workerArguments" . | nindent 2 }}
env:
  {{- include "tandem.workerEnv" . | nindent 2 }}
ports:
  {{- include "tandem.workerPorts" . | nindent 2 }}
# SIGTERM is the drain: the worker tells the routers, finishes what it has within its grace, moves the
# rest to other workers and ends. A hook before that would only be time that it does not have.
startupProbe:
  httpGet:
    path: /ready
    port: health
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (add $values.startupSeconds 4) 5) }}
livenessProbe:
  httpGet:
    path: /health
    port: health
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /ready
    port: health
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
resources:
  {{- include "tandem.resources" (dict "resources" $values.resources "values" $values "gpus" (ternary $ranks 0 (eq $device "cuda"))) | nindent 2 }}
securityContext:
  {{- include "tandem.containerSecurity" (dict "root" $root "pinsMemory" (ne $values.rdma.resource "")) | nindent 2 }}
volumeMounts:
  {{- include "tandem.commonMounts" $root | nindent 2 }}
  {{- include "tandem.computeMounts" . | nindent 2 }}
{{- end -}}

{{/* Where this pod's peers call it. A certificate can name pods' names, but not their addresses. */}}
{{- define "tandem.workerAdvertise" -}}
{{- if .root.Values.tls.enabled -}}
{{- printf "$(POD_NAME).%s" (include "tandem.dns" (dict "root" .root "name" (include "tandem.roleName" .))) -}}
{{- else -}}
$(POD_IP)
{{- end -}}
{{- end -}}

{{- define "tandem.routers" -}}
{{- $name := printf "%s-routers" (include "tandem.routersFullname" .) -}}
{{- printf "dns+%s:%v" (include "tandem.dns" (dict "root" . "name" $name)) .Values.router.ports.control -}}
{{- end -}}

{{- define "tandem.workerArguments" -}}
{{- $values := .values -}}
- --config=/etc/tandem/config.toml
{{- if gt ($values.hosts | int) 1 }}
- '--instance={{ include "tandem.roleName" . }}-$(GROUP_INDEX)'
- '--hosts={{ $values.hosts }}'
- '--host-index=$(HOST_INDEX)'
- '--rendezvous={{ include "tandem.roleName" . }}-$(GROUP_INDEX).{{ include "tandem.dns" (dict "root" .root "name" (include "tandem.roleName" .)) }}:{{ include "tandem.rendezvousPort" . }}'
{{- else }}
- '--instance=$(POD_NAME)'
{{- end }}
- '--routers={{ include "tandem.routers" .root }}'
- '--host={{ .root.Values.listen }}'
- '--advertise={{ include "tandem.workerAdvertise" . }}'
- '--port-base={{ $values.ports.base }}'
- '--health-port={{ $values.ports.health }}'
- '--grace={{ $values.drainSeconds }}'
{{- end -}}

{{- define "tandem.workerEnv" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- if gt (.values.hosts | int) 1 }}
- name: GROUP_INDEX
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
- name: HOST_INDEX
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
{{- end }}
{{ include "tandem.commonEnv" .root }}
- name: XDG_CACHE_HOME
  value: /var/cache/tandem
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
The ports of `tandem worker`: each rank has one for gRPC from the base on, one for metrics a hundred
higher, one for KV two hundred higher, one for routers' short calls three hundred and ten higher; the ranks
of several hosts meet between those.
*/}}
{{- define "tandem.workerPorts" -}}
{{- $base := .values.ports.base | int -}}
- name: health
  containerPort: {{ .values.ports.health }}
{{- range $rank := until (include "tandem.endpointsPerHost" . | int) }}
- name: grpc-{{ $rank }}
  containerPort: {{ add $base $rank }}
- name: metrics-{{ $rank }}
  containerPort: {{ add $base 100 $rank }}
- name: calls-{{ $rank }}
  containerPort: {{ add $base 310 $rank }}
{{- end }}
{{- range $rank := until (include "tandem.ranksPerHost" . | int) }}
- name: kv-{{ $rank }}
  containerPort: {{ add $base 200 $rank }}
{{- end }}
{{- if gt (.values.hosts | int) 1 }}
- name: rendezvous
  containerPort: {{ include "tandem.rendezvousPort" . }}
{{- end }}
{{- end -}}

{{- define "tandem.rendezvousPort" -}}
{{- add .values.ports.base 301 -}}
{{- end -}}
