{{/* What pods of all parts have in common. */}}

{{- define "tandem.configChecksum" -}}
{{- printf "%s" (include "tandem.toml" .) | sha256sum -}}
{{- end -}}

{{/* Annotations of a part's pods: (dict "root" $ "values" the part's). */}}
{{- define "tandem.podAnnotations" -}}
{{- $own := dict "checksum/config" (include "tandem.configChecksum" .root) -}}
{{- if and .root.Values.router.models (eq .part "router") -}}
{{- $_ := set $own "checksum/models" (include "tandem.modelsToml" .root | sha256sum) -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .root.Values.podAnnotations) .values.podAnnotations $own | toYaml -}}
{{- end -}}

{{/* Without the chart's version: a new one by itself is no reason to restart anything. */}}
{{- define "tandem.podLabels" -}}
{{- $own := include "tandem.partSelector" . | fromYaml -}}
{{- with .root.Values.join.release -}}
{{- $_ := set $own "tandem/joins" . -}}
{{- end -}}
{{- mergeOverwrite (deepCopy .root.Values.podLabels) .values.podLabels $own | toYaml -}}
{{- end -}}

{{/* Who runs it, and where: (dict "root" $ "values" the part's "part" "router"). */}}
{{- define "tandem.podBasics" -}}
serviceAccountName: {{ include "tandem.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
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
{{- $context := deepCopy .root.Values.containerSecurityContext -}}
{{- if .pinsMemory -}}
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
      name: {{ include "tandem.secretName" . }}
      key: {{ .Values.secret.key }}
- name: TANDEM_PREVIOUS_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "tandem.secretName" . }}
      key: {{ .Values.secret.previousKey }}
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
  readOnly: {{ .Values.model.readOnly }}
{{- end }}
{{- end -}}

{{- define "tandem.commonVolumes" -}}
- name: config
  configMap:
    name: {{ include "tandem.fullname" . }}-config
- name: tmp
  emptyDir: {}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- if eq .Values.model.source "hostPath" }}
- name: model
  hostPath:
    path: {{ .Values.model.hostPath }}
    type: Directory
{{- else if ne .Values.model.source "bundled" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ include "tandem.modelClaim" . }}
    readOnly: {{ .Values.model.readOnly }}
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
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
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
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources with GPUs and network cards: (dict "resources" ... "values" the role's "gpus" 8). */}}
{{- define "tandem.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $limits := default dict $resources.limits -}}
{{- if gt (.gpus | int) 0 -}}
{{- $_ := set $limits .values.gpu.resource (.gpus | toString) -}}
{{- end -}}
{{- if and .values.rdma.resource (gt (.values.rdma.count | int) 0) -}}
{{- $_ := set $limits .values.rdma.resource (.values.rdma.count | toString) -}}
{{- end -}}
{{- if $limits -}}
{{- $_ := set $resources "limits" $limits -}}
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
