{{/* What pods of all parts have in common. */}}

{{- define "tandem.configChecksum" -}}
{{- printf "%s" (include "tandem.toml" .) | sha256sum -}}
{{- end -}}

{{/* What may be told to every pod: values of the chart as a whole, over which a part has its own. */}}
{{- define "tandem.podKeys" -}}
nodeSelector tolerations affinity priorityClassName runtimeClassName schedulerName hostNetwork hostIPC dnsPolicy dnsConfig hostAliases podSecurityContext containerSecurityContext topologySpreadConstraints podLabels podAnnotations env envFrom extraVolumes extraVolumeMounts
{{- end -}}

{{/* Those of them that pods beside the service take from the routers: where they run, and as whom. */}}
{{- define "tandem.placeKeys" -}}
image nodeSelector tolerations affinity priorityClassName runtimeClassName schedulerName hostNetwork hostIPC dnsPolicy dnsConfig hostAliases podSecurityContext containerSecurityContext
{{- end -}}

{{/*
The values of one part as YAML, the later ones over the earlier: of every pod; of `workers`, for a role; where
routers run, for `helm test` and the download; the part's own. (dict "root" $ "part" "decode")
*/}}
{{- define "tandem.values" -}}
{{- $all := .root.Values -}}
{{- $layers := list (dict "from" $all "keys" (include "tandem.podKeys" . | trim)) -}}
{{- $own := get $all .part -}}
{{- if has .part (list "prefill" "decode") -}}
{{- $layers = append $layers (dict "from" $all.workers) -}}
{{- else if ne .part "router" -}}
{{- $layers = append $layers (dict "from" $all.router "keys" (include "tandem.placeKeys" . | trim)) -}}
{{- end -}}
{{- if eq .part "download" -}}
{{- $own = $all.model.download -}}
{{- end -}}
{{- $values := dict -}}
{{- range append $layers (dict "from" $own) -}}
{{- $from := .from -}}
{{- $layer := $from -}}
{{- if .keys -}}
{{- $layer = dict -}}
{{- range $key := splitList " " .keys -}}
{{- if hasKey $from $key -}}
{{- $_ := set $layer $key (get $from $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $values = mergeOverwrite $values (deepCopy $layer) -}}
{{- end -}}
{{- toYaml $values -}}
{{- end -}}

{{/* Annotations of a part's pods: (dict "root" $ "values" the part's "part" "router"). */}}
{{- define "tandem.podAnnotations" -}}
{{- $own := dict -}}
{{- if has .part (list "router" "prefill" "decode") -}}
{{- $_ := set $own "checksum/config" (include "tandem.configChecksum" .root) -}}
{{- end -}}
{{- if and .root.Values.router.models (eq .part "router") -}}
{{- $_ := set $own "checksum/models" (include "tandem.modelsToml" .root | sha256sum) -}}
{{- end -}}
{{- mergeOverwrite (default dict .values.podAnnotations) (default dict .annotations) $own | toYaml -}}
{{- end -}}

{{/* Without the chart's version: a new one by itself is no reason to restart anything. */}}
{{- define "tandem.podLabels" -}}
{{- $own := include "tandem.partSelector" . | fromYaml -}}
{{- with .root.Values.join.release -}}
{{- $_ := set $own "tandem/joins" . -}}
{{- end -}}
{{- mergeOverwrite (default dict .values.podLabels) $own | toYaml -}}
{{- end -}}

{{/*
Every pod of the release, but for the name of one that has no workload.

(dict "root" $ "values" the part's, of tandem.values, "part" "router"
      "container" "volumes" names of the templates of what is the part's own, which get this dict
      "grace" seconds, where there is a drain; "annotations" further ones)
*/}}
{{- define "tandem.pod" -}}
metadata:
  labels:
    {{- include "tandem.podLabels" . | nindent 4 }}
  {{- with include "tandem.podAnnotations" . | fromYaml }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "tandem.podBasics" . | nindent 2 }}
  {{- if .grace }}
  terminationGracePeriodSeconds: {{ include "tandem.grace" . }}
  {{- end }}
  {{- with .restartPolicy }}
  restartPolicy: {{ . }}
  {{- end }}
  {{- $first := include "tandem.modelFirst" . | fromYamlArray }}
  {{- with concat $first (default list .values.initContainers) }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include .container . | nindent 6 | trim }}
      {{- include "tandem.containerBasics" . | nindent 6 }}
    {{- with .values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    {{- include .volumes . | nindent 4 }}
    {{- if and (eq (include "tandem.fetches" .root) "node") $first }}
    {{- with .root.Values.model.download.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Seconds until Kubernetes kills a pod: what a drain takes at least. */}}
{{- define "tandem.grace" -}}
{{- $own := default 0 .values.terminationGracePeriodSeconds | int -}}
{{- if and $own (lt $own (.grace | int)) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds = %d: the drain takes %v. Fix: %v or more, or fewer drainSeconds" .part $own .grace .grace) -}}
{{- end -}}
{{- default (.grace | int) $own -}}
{{- end -}}

{{/* What every container has: (dict "root" $ "values" the part's). */}}
{{- define "tandem.containerBasics" -}}
imagePullPolicy: {{ include "tandem.pullPolicy" . }}
{{- with .values.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "tandem.containerSecurity" . | nindent 2 }}
{{- end -}}

{{/* A probe: (dict "path" "/health" "port" "http" "scheme" "HTTPS" "timing" ours "own" the values'). */}}
{{- define "tandem.probe" -}}
{{- $get := dict "path" .path "port" .port -}}
{{- with .scheme -}}
{{- $_ := set $get "scheme" . -}}
{{- end -}}
{{- mergeOverwrite (dict "httpGet" $get) .timing (default dict .own) | toYaml -}}
{{- end -}}

{{/* Who runs it, and where: (dict "root" $ "values" the part's "part" "router"). */}}
{{- define "tandem.podBasics" -}}
serviceAccountName: {{ include "tandem.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .values.podSecurityContext | nindent 2 }}
{{- $secrets := concat .root.Values.image.pullSecrets (default list (default dict .root.Values.global).imagePullSecrets) }}
{{- with $secrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ (kindIs "map" .) | ternary (get (ternary . dict (kindIs "map" .)) "name") . | quote }}
  {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- if .values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- if .values.hostIPC }}
hostIPC: true
{{- end }}
{{- /* Without it a pod in its node's network would not know the cluster's names. */}}
{{- with default (ternary "ClusterFirstWithHostNet" "" (default false .values.hostNetwork)) .values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tandem.partSelector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
{{- $context := deepCopy .values.containerSecurityContext -}}
{{- if (default dict .values.rdma).resource -}}
{{- $capabilities := default dict $context.capabilities -}}
{{- $added := append (default list $capabilities.add) "IPC_LOCK" | uniq -}}
{{- $_ := set $context "capabilities" (merge (dict "add" $added) $capabilities) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Secrets, and folders that are not the image's. */}}
{{- define "tandem.commonEnv" -}}
- name: TANDEM_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" .root }}
      key: {{ .root.Values.secret.key | replace "{role}" .part | quote }}
- name: TANDEM_PREVIOUS_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" .root }}
      key: {{ .root.Values.secret.previousKey | replace "{role}" .part | quote }}
      optional: true
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
{{- end -}}

{{- define "tandem.commonMounts" -}}
- name: config
  mountPath: /etc/tandem
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/tandem-tls
  readOnly: true
{{- end }}
{{- if ne .Values.model.source "bundled" }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: {{ include "tandem.modelReadOnly" . }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "part" "router") */}}
{{- define "tandem.commonVolumes" -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" .root }}-config
- name: tmp
  emptyDir: {}
{{- if include "tandem.fetches" .root }}
{{ include "tandem.fetchVolume" .root }}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- with include "tandem.modelVolume" (dict "root" .root "readOnly" .root.Values.model.readOnly) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* The file of API keys, for routers. A whole folder: a single file in it would not follow the Secret. */}}
{{- define "tandem.keysMount" -}}
{{- if .Values.keys.existingSecret -}}
- name: keys
  mountPath: /etc/tandem-keys
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "tandem.keysVolume" -}}
{{- if .Values.keys.existingSecret -}}
- name: keys
  secret:
    secretName: {{ .Values.keys.existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .Values.keys.file | quote }}, path: {{ .Values.keys.file | quote }}}
{{- end -}}
{{- end -}}

{{/* Folders of a pod that computes: (dict "values" the role's). */}}
{{- define "tandem.computeMounts" -}}
- name: shm
  mountPath: /dev/shm
- name: cache
  mountPath: /var/cache/tandem
{{- end -}}

{{- define "tandem.computeVolumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .values.shm.sizeLimit }}
- name: cache
{{- if .values.cache.hostPath }}
  hostPath:
    path: {{ .values.cache.hostPath }}
    type: DirectoryOrCreate
{{- else }}
  emptyDir:
    sizeLimit: {{ .values.cache.sizeLimit }}
{{- end }}
{{- end -}}

{{/* Resources with GPUs, network cards and claimed devices: (dict "values" the role's "gpus" 8). */}}
{{- define "tandem.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- $limits := default dict $resources.limits -}}
{{- if and (gt (.gpus | int) 0) .values.gpu.resource -}}
{{- $_ := set $limits .values.gpu.resource (.gpus | toString) -}}
{{- end -}}
{{- if and .values.rdma.resource (gt (.values.rdma.count | int) 0) -}}
{{- $_ := set $limits .values.rdma.resource (.values.rdma.count | toString) -}}
{{- end -}}
{{- if $limits -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- range .values.resourceClaims -}}
{{- $_ := set $resources "claims" (append (default list $resources.claims) (dict "name" .name)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/*
The number of replicas: the one in the values, but where `kubectl scale` changed it and the values did
not change since, the one that is there. (dict "root" $ "live" the live object "replicas" 2)
*/}}
{{- define "tandem.replicas" -}}
{{- $meta := default dict .live.metadata -}}
{{- $annotations := default dict $meta.annotations -}}
{{- $before := index $annotations "tandem/replicas" -}}
{{- $spec := default dict .live.spec -}}
{{- if and $spec (eq (toString $before) (toString (.replicas | int))) -}}
{{- $spec.replicas | int -}}
{{- else -}}
{{- .replicas | int -}}
{{- end -}}
{{- end -}}
