{{/* Pods of prefill and decode: (dict "root" $ "role" "decode"). */}}

{{- define "tandem.roleName" -}}
{{- printf "%s-%s" (include "tandem.fullname" .root) .role -}}
{{- end -}}

{{- define "tandem.workerPod" -}}
{{- /* The grace that the worker knows of, and 30 s for what its ranks do after it. */}}
{{- $own := dict "container" "tandem.workerContainer" "volumes" "tandem.workerVolumes" "grace" (add .values.drainSeconds 30) -}}
{{- include "tandem.pod" (merge $own .) -}}
{{- end -}}

{{- define "tandem.workerVolumes" -}}
{{- include "tandem.commonVolumes" . }}
{{ include "tandem.computeVolumes" . }}
{{- end -}}

{{- define "tandem.workerContainer" -}}
{{- $root := .root -}}
{{- $values := .values -}}
{{- $device := include "tandem.device" . -}}
{{- $ranks := include "tandem.ranksPerHost" . | int -}}
{{- $probes := default dict $values.probes -}}
{{- $alive := dict "path" "/health" "port" "health" -}}
{{- $ready := dict "path" "/ready" "port" "health" -}}
{{- $startups := max 1 (div (add $values.startupSeconds 4) 5) -}}
name: {{ .role }}
image: {{ include "tandem.image" (merge (dict "device" $device) .) | quote }}
command: [tandem, worker, {{ .role }}]
args:
  {{- include "tandem.workerArguments" . | nindent 2 }}
  {{- with $values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  {{- include "tandem.workerEnv" . | nindent 2 }}
ports:
  {{- include "tandem.workerPorts" . | nindent 2 }}
# SIGTERM is the drain: the worker tells the routers, finishes what it has within its grace, moves the
# rest to other workers and ends. A hook before that would only be time that it does not have.
{{- with $values.lifecycle }}
lifecycle:
  {{- toYaml . | nindent 2 }}
{{- end }}
startupProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" $startups) "own" $probes.startup) $ready) | nindent 2 }}
livenessProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 3) "own" $probes.liveness) $alive) | nindent 2 }}
readinessProbe:
  {{- include "tandem.probe" (merge (dict "timing" (dict "periodSeconds" 5 "timeoutSeconds" 5 "failureThreshold" 2) "own" $probes.readiness) $ready) | nindent 2 }}
resources:
  {{- include "tandem.resources" (merge (dict "gpus" (ternary $ranks 0 (eq $device "cuda"))) .) | nindent 2 }}
volumeMounts:
  {{- include "tandem.commonMounts" $root | nindent 2 }}
  {{- include "tandem.computeMounts" . | nindent 2 }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
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
{{ include "tandem.commonEnv" . }}
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
