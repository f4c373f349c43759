{{/* Where the checkpoint comes from, and what fetches it: docs/use/kubernetes.md. */}}

{{- define "tandem.modelPath" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "bundled" -}}
{{- $model.bundledPath -}}
{{- else if and (not $model.path) $model.download.from -}}
{{- printf "%s/%s" $model.mountPath ((splitList "@" $model.download.from | first) | trimSuffix "/" | base) -}}
{{- else -}}
{{- $model.path -}}
{{- end -}}
{{- end -}}

{{/* Nobody but what fetches it writes a checkpoint that is fetched, and nobody an image. */}}
{{- define "tandem.modelReadOnly" -}}
{{- or .Values.model.readOnly (eq .Values.model.source "image") (ne .Values.model.download.from "") -}}
{{- end -}}

{{/* The volume of the checkpoint: (dict "root" $ "readOnly" true). */}}
{{- define "tandem.modelVolume" -}}
{{- $model := .root.Values.model -}}
{{- if ne $model.source "bundled" -}}
- name: model
{{- if eq $model.source "hostPath" }}
  hostPath:
    path: {{ $model.hostPath }}
    type: {{ ternary "DirectoryOrCreate" "Directory" (ne $model.download.from "") }}
{{- else if eq $model.source "image" }}
  image:
    reference: {{ $model.image.reference | quote }}
    pullPolicy: {{ $model.image.pullPolicy }}
{{- else }}
  persistentVolumeClaim:
    claimName: {{ include "tandem.modelClaim" .root }}
    readOnly: {{ .readOnly }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* How the checkpoint gets there: "" (it is there), "once" (a Job fills the claim) or "node" (every node its own). */}}
{{- define "tandem.fetches" -}}
{{- if .Values.model.download.from -}}
{{- ternary "node" "once" (eq .Values.model.source "hostPath") -}}
{{- end -}}
{{- end -}}

{{/* Init containers of what reads the checkpoint, as a list: (dict "root" $ "values" the part's "part" "router"). */}}
{{- define "tandem.modelFirst" -}}
{{- $fetches := include "tandem.fetches" .root -}}
{{- if and $fetches (has .part (list "router" "prefill" "decode")) -}}
{{- $isNode := eq $fetches "node" -}}
{{- $device := "cpu" -}}
{{- if ne .part "router" -}}
{{- $device = include "tandem.device" (dict "root" .root "role" .part) -}}
{{- end -}}
{{- $download := include "tandem.values" (dict "root" .root "part" "download") | fromYaml -}}
{{- $image := default dict .values.image -}}
{{- if $isNode -}}
{{- $image = mergeOverwrite (deepCopy $image) .root.Values.model.download.image -}}
{{- end -}}
- name: model
  image: {{ include "tandem.image" (dict "root" .root "values" (dict "image" $image) "device" $device) | quote }}
  {{- include "tandem.fetchCommand" (dict "root" .root "work" (ternary "fetch" "wait" $isNode)) | nindent 2 }}
  {{- if $isNode }}
  env:
    {{- include "tandem.fetchEnv" (dict "root" .root "values" $download) | nindent 4 }}
  {{- with $download.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  imagePullPolicy: {{ include "tandem.pullPolicy" (dict "root" .root "values" (dict "image" $image)) }}
  resources:
    {{- toYaml (ternary $download.resources (dict "requests" (dict "cpu" "10m" "memory" "64Mi") "limits" (dict "memory" "256Mi")) $isNode) | nindent 4 }}
  securityContext:
    {{- include "tandem.containerSecurity" (dict "values" (dict "containerSecurityContext" .values.containerSecurityContext)) | nindent 4 }}
  volumeMounts:
    {{- include "tandem.fetchMounts" (dict "root" .root "readOnly" (not $isNode)) | nindent 4 }}
    {{- if $isNode }}
    {{- with .root.Values.model.download.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}

{{- define "tandem.fetchCommand" -}}
command: [python, /etc/tandem-fetch/fetch.py]
args:
  - {{ .work }}
  - {{ .root.Values.model.download.from | quote }}
  - {{ include "tandem.modelPath" .root | quote }}
{{- end -}}

{{/* (dict "root" $ "values" the download's) */}}
{{- define "tandem.fetchEnv" -}}
- name: HOME
  value: /tmp
- name: PYTHONUNBUFFERED
  value: "1"
{{- $token := .values.tokenSecret }}
{{- with $token.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $token.key | quote }}
{{- end }}
{{- with .values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.fetchMounts" -}}
- name: fetch
  mountPath: /etc/tandem-fetch
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: model
  mountPath: {{ .root.Values.model.mountPath }}
  readOnly: {{ .readOnly }}
{{- end -}}

{{- define "tandem.fetchVolume" -}}
- name: fetch
  configMap:
    name: {{ include "tandem.fullname" . }}-fetch
{{- end -}}

{{/* The container and the volumes of the Job that fills a claim: (dict "root" $ "values" the part's). */}}
{{- define "tandem.downloadContainer" -}}
name: download
image: {{ include "tandem.image" (merge (dict "device" "cpu") .) | quote }}
{{ include "tandem.fetchCommand" (dict "root" .root "work" "fetch") }}
env:
  {{- include "tandem.fetchEnv" . | nindent 2 }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
volumeMounts:
  {{- include "tandem.fetchMounts" (dict "root" .root "readOnly" false) | nindent 2 }}
  {{- with .values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tandem.downloadVolumes" -}}
{{ include "tandem.fetchVolume" .root }}
- name: tmp
  emptyDir: {}
{{ include "tandem.modelVolume" (dict "root" .root "readOnly" false) }}
{{- end -}}

{{/* Of `model`, what the schema cannot say because it takes two values. */}}
{{- define "tandem.checkModel" -}}
{{- $model := .Values.model -}}
{{- $path := include "tandem.modelPath" . -}}
{{- $from := $model.download.from -}}
{{- $isClaim := has $model.source (list "claim" "existingClaim") -}}
{{- if and $from (not (or $isClaim (eq $model.source "hostPath"))) -}}
{{- fail (printf "model.download.from = %q: model.source is %s, which nothing can write to. Fix: claim, existingClaim or hostPath" $from $model.source) -}}
{{- end -}}
{{- if and (eq $model.source "claim") (not (or $from $model.claim.volumeName)) -}}
{{- fail "model.source = claim: nothing fills the new claim. Fix: model.download.from (a model of the hub, or a URL), model.claim.volumeName (a volume that holds the checkpoint), or source existingClaim" -}}
{{- end -}}
{{- if and (ne $model.source "bundled") (not $path) -}}
{{- fail (printf "model.path = \"\": model.source is %s. Fix: the checkpoint's folder, below %s" $model.source $model.mountPath) -}}
{{- end -}}
{{- if and (ne $model.source "bundled") (ne $path $model.mountPath) (not (hasPrefix (printf "%s/" $model.mountPath) $path)) -}}
{{- fail (printf "model.path = %q: is not in the volume. Fix: a folder below model.mountPath, %s" $path $model.mountPath) -}}
{{- end -}}
{{- if and $from (eq $path $model.mountPath) -}}
{{- fail (printf "model.path = %q: what is fetched needs a folder of its own. Fix: one below it, or none" $path) -}}
{{- end -}}
{{- if and (eq $model.source "existingClaim") (not $model.existingClaim) -}}
{{- fail "model.existingClaim = \"\": model.source is existingClaim. Fix: the claim's name" -}}
{{- end -}}
{{- if and (eq $model.source "hostPath") (not $model.hostPath) -}}
{{- fail "model.hostPath = \"\": model.source is hostPath. Fix: a folder of the nodes" -}}
{{- end -}}
{{- if and (eq $model.source "image") (not $model.image.reference) -}}
{{- fail "model.image.reference = \"\": model.source is image. Fix: an image that holds the checkpoint" -}}
{{- end -}}
{{- $modes := $model.claim.accessModes -}}
{{- if and (eq $model.source "claim") $from (not (or (has "ReadWriteMany" $modes) (has "ReadWriteOnce" $modes))) -}}
{{- fail (printf "model.claim.accessModes = %s: the download has to write what all pods read. Fix: [ReadWriteMany]" (toJson $modes)) -}}
{{- end -}}
{{- end -}}
